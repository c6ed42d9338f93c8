-- quit removes a waiter that gives up. If a release has just woken it, the next waiter is woken
-- instead. If shared holds have the key, the next waiter may be one that can join them now.
-- $1 key, $2 channel, $3 lock_timeout, $4 number of the waiter
WITH {setting}, found AS MATERIALIZED (
    -- Lock the row whatever it has, because an attempt that puts the waiter into the line may wait
    -- for the row before this statement.
    SELECT l.*, (l.heir = $4::bigint AND l.expires IS NULL) IS TRUE AS frees FROM setting, {table} l
    WHERE l.key = $1 FOR NO KEY UPDATE OF l
), locked AS MATERIALIZED (
    SELECT *, frees OR readers IS NOT NULL AS wakes, heir IS DISTINCT FROM $4 AS stays, $4 AS quits
    FROM found WHERE heir = $4 OR $4 = ANY (waiters)
), {pass}, freed AS (
    UPDATE {table} l SET {passes} FROM passed p WHERE l.key = p.key
    RETURNING p.wakes
)
-- If a crash loses this, the heir's second or the 3 s of a waiter run out.
SELECT set_config('synchronous_commit', 'off', true), {wake} FROM freed
