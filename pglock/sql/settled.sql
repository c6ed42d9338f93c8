-- settled is true if the waiter $7 keeps its place in the line of l for half its time, or the line
-- is full.
(cardinality(l.waiters) >= 100 OR EXISTS (
    SELECT FROM unnest(l.waiters, l.ends) AS w (id, until)
    WHERE w.id = $7 AND {present} AND w.until > clock_timestamp() + $10::bigint / 2 * interval '1 us')) IS TRUE
