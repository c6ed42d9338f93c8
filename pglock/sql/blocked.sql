-- blocked tells why an attempt has waited too long for a lock of PostgreSQL. The lock may be on
-- the row or the table, or be short and internal, such as the lock to extend the table's file.
-- $1 key, $2 the table's name in quotes
-- Returns one row: whether another statement locks the whole table against writes, or waits to do
-- so; whether another transaction has locked the row.
WITH unlocked AS MATERIALIZED (
    SELECT FROM {table} WHERE key = $1 FOR UPDATE SKIP LOCKED
)
SELECT EXISTS (
    SELECT FROM pg_locks WHERE locktype = 'relation' AND relation = to_regclass($2)
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
        AND mode IN ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')),
    EXISTS (SELECT FROM {table} WHERE key = $1) AND NOT EXISTS (SELECT FROM unlocked)
