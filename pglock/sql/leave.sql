-- leave ends one shared hold.
-- $1 key, $2 token, $3 channel, $4 message, $5 lock_timeout
-- Returns a row if the token held the key.
WITH setting AS MATERIALIZED (
    SELECT set_config('lock_timeout', $5, true)
), freed AS (
    -- The key ends with the longest of the other shared holds, and is free if there is none.
    UPDATE {table} l SET
        readers = (
            SELECT jsonb_object_agg(r.key, r.value) FROM jsonb_each(l.readers - $2::text) r
            WHERE (r.value ->> 'end')::timestamptz > clock_timestamp()),
        expires = (
            SELECT max((r.value ->> 'end')::timestamptz) FROM jsonb_each(l.readers - $2::text) r
            WHERE (r.value ->> 'end')::timestamptz > clock_timestamp()),
        since = clock_timestamp()
    FROM setting
    WHERE key = $1 AND (readers -> $2::text ->> 'end')::timestamptz > clock_timestamp()
    RETURNING wanted, readers
)
SELECT set_config('synchronous_commit', 'off', true),
    CASE WHEN readers IS NULL AND wanted > clock_timestamp() THEN pg_notify($3, $4) END IS NULL
FROM freed
