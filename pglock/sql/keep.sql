-- keep ends a hold and leaves the key taken, by nobody, for another while.
-- $1 key, $2 token, $3 the while in µs, $4 channel, $5 message, $6 lock_timeout
-- Returns a row if the token held the key.
WITH setting AS MATERIALIZED (
    SELECT set_config('lock_timeout', $6, true)
), kept AS (
    UPDATE {table} SET token = NULL, expires = clock_timestamp() + $3::bigint * interval '1 us'
    FROM setting
    WHERE key = $1 AND token = $2 AND expires > clock_timestamp()
    RETURNING wanted
)
-- Those who wait learn when to look. This waits for the disk: the key must stay taken.
SELECT CASE WHEN wanted > clock_timestamp() THEN pg_notify($4, $5) END IS NULL FROM kept
