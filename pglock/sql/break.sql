-- break ends every hold of a key, and wakes the next waiter, as release does.
-- $1 key, $2 channel, $3 lock_timeout
WITH setting AS MATERIALIZED (
    SELECT set_config('lock_timeout', $3, true)
), locked AS MATERIALIZED (
    SELECT l.*, true AS frees, true AS wakes, 0::bigint AS quits FROM setting, {table} l
    WHERE l.key = $1 AND l.expires > clock_timestamp() FOR NO KEY UPDATE OF l
), {pass}, freed AS (
    UPDATE {table} l SET token = NULL, owner = '', readers = NULL, expires = NULL, since = p.now, {passes}
    FROM passed p WHERE l.key = p.key
    RETURNING p.wakes
)
SELECT {wake $2} FROM freed
