-- passes writes what pass has found.
waiters = p.waiters, ends = p.ends,
heir = CASE WHEN p.stays THEN l.heir ELSE p.heir END,
-- The heir may give up before the second is over. If there is no heir, heir_until means nothing.
heir_until = CASE WHEN p.stays THEN l.heir_until ELSE least(p.now + interval '1 s', p.heir_end) END
