-- sweep deletes up to 1,000 rows of keys that have been free for a while.
-- $1 the while in µs
-- A new row takes its fence from the clock. This fence is larger than that of the deleted row,
-- unless the clock is set back by more than $1.
WITH old AS MATERIALIZED (
    -- Skip locked rows: a call uses the row, or a transaction guards a write of its last holder.
    SELECT key FROM {table}
    WHERE greatest(since, expires) < clock_timestamp() - $1::bigint * interval '1 us'
        AND (greatest(wanted, writer_until) < clock_timestamp()) IS NOT FALSE
        -- If a clock that was ahead made the fence, the row stays until the clock has passed it.
        AND fence < (extract(epoch FROM clock_timestamp()) * 1000000)::bigint - $1::bigint
    LIMIT 1000 FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM {table} l USING old WHERE l.key = old.key RETURNING 1
)
SELECT count(*), set_config('synchronous_commit', 'off', true) FROM gone
