-- sweep looks at the next 10,000 rows, and deletes those of keys that have been free for a while.
-- $1 the while in µs, $2 the last key that the statement before has looked at, in hexadecimal
-- Returns that key for the next statement, or NULL if this was the last one.
-- A new row takes its fence from the clock. This fence is larger than that of the deleted row,
-- unless the clock is set back by more than $1.
WITH page AS MATERIALIZED (
    SELECT key FROM {table} WHERE key > decode($2, 'hex') ORDER BY key LIMIT 10000
), old AS MATERIALIZED (
    -- Skip locked rows: a call uses the row, or a transaction guards a write of its last holder.
    SELECT l.key FROM page JOIN {table} l ON l.key = page.key
    WHERE greatest(l.since, l.expires) < clock_timestamp() - $1::bigint * interval '1 us'
        -- Nobody waits for the key.
        AND (l.heir_until < clock_timestamp()) IS NOT FALSE
        AND NOT EXISTS (SELECT FROM unnest(l.ends) u WHERE u > clock_timestamp())
        -- If a clock that was ahead made the fence, the row stays until the clock has passed it.
        AND l.fence < {micros} - $1::bigint
    FOR UPDATE OF l SKIP LOCKED
), gone AS (
    DELETE FROM {table} l USING old WHERE l.key = old.key RETURNING set_config('synchronous_commit', 'off', true)
)
SELECT (SELECT encode(key, 'hex') FROM page ORDER BY key DESC LIMIT 1), (SELECT count(*) FROM gone)
