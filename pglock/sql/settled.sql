-- settled is true if the caller need not be written into the line of l: the place of the waiter $7
-- lasts for half its time or longer, or others fill the line.
(EXISTS (SELECT FROM unnest(l.waiters, l.ends) AS w (id, until)
        WHERE w.id = $7 AND {present} AND w.until > clock_timestamp() + $10::bigint / 2 * interval '1 us')
    OR cardinality(l.waiters) >= 100 AND (
        SELECT count(*) >= 100 AND NOT bool_or(w.id = $7)
        FROM unnest(l.waiters, l.ends) AS w (id, until) WHERE {present})) IS TRUE
