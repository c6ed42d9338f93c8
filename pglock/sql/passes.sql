-- passes writes what pass has found.
waiters = p.waiters, ends = p.ends,
heir = p.heir, heir_until = CASE WHEN p.heir IS NOT NULL THEN p.now + interval '1 s' END
