-- ahead is true if a caller that wants l alone waits, and came before the waiter $7.
((l.heir = $7 AND l.heir_until > clock_timestamp()) IS NOT TRUE AND EXISTS (
    SELECT FROM unnest(l.waiters, l.ends) WITH ORDINALITY AS w (id, until, n)
    WHERE w.id > 0 AND {present} AND w.n < coalesce(array_position(l.waiters, $7), 2147483647)))
