-- release frees a key, or keeps it taken without a holder for a period. It wakes the callers that
-- wait for the key, so that they try again, or learn when the period ends.
-- $1 key, $2 token, $3 the period in µs or NULL, $4 channel, $5 message, $6 lock_timeout
-- Returns a row if the token held the key.
WITH setting AS MATERIALIZED (
    SELECT set_config('lock_timeout', $6, true)
), freed AS (
    -- The row stays, because it has the fence. At the commit, others see that the key is free.
    UPDATE {table} SET token = NULL, expires = clock_timestamp() + $3::bigint * interval '1 us',
        owner = CASE WHEN $3 IS NULL THEN '' ELSE owner END,
        since = CASE WHEN $3 IS NULL THEN clock_timestamp() ELSE since END
    FROM setting
    WHERE key = $1 AND token = $2 AND expires > clock_timestamp()
    RETURNING wanted
)
-- A release does not wait for the disk, because if a crash loses it, the hold ends with its term.
-- But a release that keeps the key taken waits: the key must stay taken after a crash.
-- A message takes time in every session that listens, so there is none unless a caller waits.
SELECT CASE WHEN $3 IS NULL THEN set_config('synchronous_commit', 'off', true) END,
    CASE WHEN wanted > clock_timestamp() THEN pg_notify($4, $5) END IS NULL
FROM freed
