-- inspect reports on a key. $1 key
SELECT {entry} FROM {table} WHERE key = $1
