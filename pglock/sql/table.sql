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
    wanted       timestamptz,               -- until then a release wakes those who wait
    writer       text,                      -- token of a caller that waits for the end of shared holds
    writer_until timestamptz                -- until then no new shared hold is granted
) WITH (
    -- Room for new versions of a row on its page, which then need no change of the index.
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_threshold = 500,
    autovacuum_analyze_scale_factor = 0.1,
    autovacuum_vacuum_cost_delay = 0
)
