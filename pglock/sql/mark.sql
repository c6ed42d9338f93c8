-- mark makes each release in the next 3 s wake the callers that wait for the key.
-- $1 key, $2 token, $3 whether the caller wants a shared hold, $4 lock_timeout
-- Returns a row if the key is still held. If not, the release came before the mark, so
-- nothing wakes the caller, who must attempt again.
WITH setting AS MATERIALIZED (
    SELECT set_config('lock_timeout', $4, true)
), marked AS (
    UPDATE {table} SET
        wanted = clock_timestamp() + interval '3 s',
        writer = CASE WHEN readers IS NOT NULL AND NOT $3 THEN $2 ELSE writer END,
        writer_until = CASE WHEN readers IS NOT NULL AND NOT $3
            THEN clock_timestamp() + interval '3 s' ELSE writer_until END
    FROM setting
    WHERE key = $1 AND (expires > clock_timestamp()
        OR $3 AND writer_until > clock_timestamp()
            AND writer_until <= clock_timestamp() + interval '3 s') -- see join
    RETURNING 1
)
-- If a crash loses the mark, that costs a second at most, because waiters try once a second.
SELECT set_config('synchronous_commit', 'off', true) FROM marked
