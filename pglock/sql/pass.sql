-- pass finds who is next after the row was locked. It reads from locked the row, and frees: whether
-- the key is free now; wakes: whether to wake the first waiter; stays: whether the present heir
-- stays; quits: a waiter that leaves.
moment AS MATERIALIZED (
    -- One reading of the clock, after the row is locked: all decisions about ends must agree.
    SELECT *, clock_timestamp() AS now FROM locked
), line AS MATERIALIZED (
    SELECT w.id, w.until, row_number() OVER (ORDER BY w.n) AS turn
    FROM moment m, unnest(m.waiters, m.ends) WITH ORDINALITY AS w (id, until, n)
    WHERE w.id <> m.quits AND w.until > m.now AND w.until <= m.now + interval '3 s'
), passed AS MATERIALIZED (
    SELECT m.key, m.now, m.stays,
        max(w.id) FILTER (WHERE m.wakes AND w.turn = 1) AS wakes,
        max(w.id) FILTER (WHERE m.frees AND w.turn = 1) AS heir,
        max(w.until) FILTER (WHERE m.frees AND w.turn = 1) AS heir_end,
        -- An heir leaves the line. If it has died, only its second is lost.
        array_agg(w.id ORDER BY w.turn) FILTER (WHERE w.turn > 1 OR NOT m.frees) AS waiters,
        array_agg(w.until ORDER BY w.turn) FILTER (WHERE w.turn > 1 OR NOT m.frees) AS ends
    FROM moment m LEFT JOIN line w ON true GROUP BY m.key, m.now, m.stays
)
