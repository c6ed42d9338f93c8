-- setting is the first part of statements that wait for the lock of a row. $3 is the lock_timeout.
setting AS MATERIALIZED (
    SELECT set_config('lock_timeout', $3, true)
)
