-- leaves removes the waiter $7 from the line of l, and those who ask no more.
(waiters, ends) = (
    SELECT array_agg(w.id ORDER BY w.n), array_agg(w.until ORDER BY w.n)
    FROM unnest(l.waiters, l.ends) WITH ORDINALITY AS w (id, until, n)
    WHERE w.id <> $7 AND {present})
