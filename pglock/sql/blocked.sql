-- blocked tells why an attempt has waited too long for a lock of PostgreSQL. The lock may be on
-- the row or the table, or be short and internal, such as the lock to extend the table's file.
-- $1 key, $2 the table's name in quotes, $3 lock_timeout
-- Returns one row: whether the key is held, and the hold as in take; whether another statement
-- locks the whole table against writes, or waits to do so; whether the row is locked.
WITH setting AS MATERIALIZED (
    SELECT set_config('lock_timeout', $3, true), set_config('synchronous_commit', 'off', true)
), unlocked AS MATERIALIZED (
    SELECT l.key FROM setting, {table} l
    WHERE l.key = $1 AND (l.expires IS NULL OR l.expires <= clock_timestamp())
    FOR UPDATE OF l SKIP LOCKED
)
SELECT h.expires > clock_timestamp() IS TRUE, coalesce(encode(h.owner, 'hex'), ''), h.readers IS NOT NULL,
    {left},
    EXISTS (
        SELECT FROM pg_locks WHERE locktype = 'relation' AND relation = to_regclass($2)
            AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
            AND mode IN ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')),
    h.key IS NOT NULL AND NOT EXISTS (SELECT FROM unlocked)
FROM (SELECT) one LEFT JOIN {table} h ON h.key = $1
