-- patience sets the lock_timeout. Only one who takes the key waits for transactions that guard a
-- write.
setting AS MATERIALIZED (
    SELECT set_config('lock_timeout', CASE WHEN EXISTS (SELECT FROM seen) THEN $9 ELSE $6 END, true)
)
