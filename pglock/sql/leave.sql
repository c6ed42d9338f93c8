-- leave ends one shared hold.
-- $1 key, $2 token, $3 channel, $4 message, $5 lock_timeout
-- Returns a row if the token held the key.
WITH setting AS MATERIALIZED (
    SELECT set_config('lock_timeout', $5, true)
), locked AS MATERIALIZED (
    SELECT l.key FROM setting, {table} l WHERE l.key = $1 FOR NO KEY UPDATE OF l
), moment AS MATERIALIZED (
    -- One reading of the clock, after the row is locked, as renewshared does.
    SELECT key, clock_timestamp() AS now FROM locked
), freed AS (
    -- The key is held until the last end of the other shared holds, or free if there is none.
    UPDATE {table} l SET
        readers = (
            SELECT jsonb_object_agg(r.key, r.value) FROM jsonb_each(l.readers - $2::text) r
            WHERE (r.value ->> 'end')::timestamptz > m.now),
        expires = (
            SELECT max((r.value ->> 'end')::timestamptz) FROM jsonb_each(l.readers - $2::text) r
            WHERE (r.value ->> 'end')::timestamptz > m.now),
        since = m.now
    FROM moment m
    WHERE l.key = m.key AND (l.readers -> $2::text ->> 'end')::timestamptz > m.now
    RETURNING wanted, readers
)
SELECT set_config('synchronous_commit', 'off', true),
    CASE WHEN readers IS NULL AND wanted > clock_timestamp() THEN pg_notify($3, $4) END IS NULL
FROM freed
