-- passes writes what pass has found.
waiters = p.waiters, ends = p.ends,
-- The heir may give up before the second is over. If there is no heir, heir_until means nothing.
heir = p.heir, heir_until = least(p.now + interval '1 s', p.heir_end)
