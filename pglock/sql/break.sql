-- break ends every hold of a key, and wakes those who wait for it.
-- $1 key, $2 channel, $3 message, $4 lock_timeout
WITH setting AS MATERIALIZED (
    SELECT set_config('lock_timeout', $4, true)
), freed AS (
    UPDATE {table} SET token = NULL, owner = '', readers = NULL, expires = NULL, since = clock_timestamp(),
        writer = NULL, writer_until = NULL
    FROM setting WHERE key = $1 AND expires > clock_timestamp()
    RETURNING wanted
)
SELECT CASE WHEN wanted > clock_timestamp() THEN pg_notify($2, $3) END IS NULL FROM freed
