-- refuses is true if the row l refuses the waiter $7, who wants a shared hold if $10 is true.
(
    -- The key is held. A shared claim can join shared holds.
    l.expires > clock_timestamp() AND (l.readers IS NULL OR NOT $10)
    -- Only the heir may take the free key. An heir that has died keeps others out for a second, and
    -- an heir that wants a shared hold keeps out no shared claim. A later time comes from a clock
    -- that was wrong.
    OR l.heir <> $7 AND l.readers IS NULL AND (l.heir > 0 OR NOT $10)
        AND l.heir_until > clock_timestamp() AND l.heir_until <= clock_timestamp() + interval '1 s'
    -- A waiter that wants the key alone came before this shared claim.
    OR $10 AND (l.heir = $7 AND l.heir_until > clock_timestamp()) IS NOT TRUE AND EXISTS (
        SELECT FROM unnest(l.waiters, l.ends) WITH ORDINALITY AS w (id, until, n)
        WHERE w.id > 0 AND {present} AND w.n < coalesce(array_position(l.waiters, $7), 2147483647))
) IS TRUE
