-- unmark removes the mark of a caller that waited for the end of shared holds, and left.
-- $1 key, $2 token, $3 channel, $4 message, $5 lock_timeout
WITH setting AS MATERIALIZED (
    SELECT set_config('lock_timeout', $5, true)
), left_it AS (
    UPDATE {table} SET writer = NULL, writer_until = NULL FROM setting
    WHERE key = $1 AND writer = $2
    RETURNING wanted
)
SELECT set_config('synchronous_commit', 'off', true),
    CASE WHEN wanted > clock_timestamp() THEN pg_notify($3, $4) END IS NULL
FROM left_it
