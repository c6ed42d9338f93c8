-- blocked tells why an attempt has waited too long for a lock of PostgreSQL.
-- $1 key, $2 the table's name in quotes
-- Returns one row as take does about the hold, if there is one. The last value is whether
-- another statement locks the whole table against writes, or waits to do so.
SELECT NULL::bigint, h.owner, coalesce(h.readers IS NOT NULL, false),
    (extract(epoch FROM h.expires - clock_timestamp()) * 1000000)::bigint,
    EXISTS (
        SELECT FROM pg_locks WHERE locktype = 'relation' AND relation = to_regclass($2)
            AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
            AND mode IN ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock'))
FROM (SELECT) one LEFT JOIN {table} h ON h.key = $1 AND h.expires > clock_timestamp()
