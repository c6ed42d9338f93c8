-- The table of the locks. A row is a key that is held, or a key that was held in the last
-- hour: its row keeps the fence.
CREATE TABLE IF NOT EXISTS {table} (
    key          bytea PRIMARY KEY,
    token        text,                      -- the exclusive holder's proof; NULL if there is none
    owner        bytea NOT NULL DEFAULT '', -- the holder's label
    readers      jsonb,                     -- of shared holds: {token: {"owner": hex, "end": time}}
    since        timestamptz NOT NULL,      -- when the key was taken or given back
    expires      timestamptz,               -- when the last hold ends; NULL if the key is free
    fence        bigint NOT NULL,           -- grows with each hold
    fenced       boolean NOT NULL,          -- whether the last hold asked for its fence
    waiters      bigint[],                  -- those who wait, in order; negative if for a shared hold
    ends         timestamptz[],             -- when each waiter is forgotten, unless it asks again
    heir         bigint,                    -- the waiter that the last release has woken
    heir_until   timestamptz                -- until then only the heir may take the free key
) WITH (
    -- Room for new versions of a row on its page, which then need no change of the index.
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_threshold = 500,
    autovacuum_analyze_scale_factor = 0.1,
    autovacuum_vacuum_cost_delay = 0
)
