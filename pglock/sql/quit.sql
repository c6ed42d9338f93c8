-- quit removes a waiter that gives up. If a release has just woken it, the next waiter is woken
-- instead. If shared holds have the key, the next waiter may be one that can join them now.
-- $1 key, $2 number of the waiter, $3 channel, $4 lock_timeout
WITH setting AS MATERIALIZED (
    SELECT set_config('lock_timeout', $4, true)
), found AS MATERIALIZED (
    -- Lock the row whatever it has, because an attempt that puts the waiter into the line may wait
    -- for the row before this statement.
    SELECT l.*, (l.heir = $2::bigint AND l.expires IS NULL) IS TRUE AS frees FROM setting, {table} l
    WHERE l.key = $1 FOR NO KEY UPDATE OF l
), locked AS MATERIALIZED (
    SELECT *, frees OR readers IS NOT NULL AS wakes, $2 AS quits FROM found
    WHERE heir = $2 OR $2 = ANY (waiters)
), {pass}, freed AS (
    -- The heir stays unless it is the one that quits.
    UPDATE {table} l SET waiters = p.waiters, ends = p.ends,
        heir = CASE WHEN l.heir = $2 THEN p.heir ELSE l.heir END,
        heir_until = CASE WHEN l.heir = $2 THEN least(p.now + interval '1 s', p.heir_end) ELSE l.heir_until END
    FROM passed p WHERE l.key = p.key
    RETURNING p.wakes
)
-- If a crash loses this, the heir's second or the 3 s of a waiter run out.
SELECT set_config('synchronous_commit', 'off', true), {wake $3} FROM freed
