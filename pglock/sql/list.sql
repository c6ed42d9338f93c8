-- list reads the next 1,000 keys, and reports on the held ones.
-- $1 the first key to read
-- Returns a row, as inspect does, for each held key, and for the last of the 1,000 keys: the next
-- call continues after that key.
WITH page AS MATERIALIZED (
    -- No caller's key is empty. The row of the empty key belongs to the sweep.
    SELECT * FROM {table} WHERE key >= $1::bytea AND key <> '' ORDER BY key LIMIT 1000
)
SELECT {entry}
FROM page
WHERE expires > clock_timestamp() OR key = (SELECT key FROM page ORDER BY key DESC LIMIT 1)
ORDER BY key
