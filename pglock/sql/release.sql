-- release gives a key back, and wakes those who wait for it.
-- $1 key, $2 token, $3 channel, $4 message, $5 lock_timeout
-- Returns a row if the token held the key.
WITH setting AS MATERIALIZED (
    SELECT set_config('lock_timeout', $5, true)
), freed AS (
    -- The row stays, because it has the fence. Others see its key free in the same moment.
    UPDATE {table} SET token = NULL, owner = '', expires = NULL, since = clock_timestamp()
    FROM setting
    WHERE key = $1 AND token = $2 AND expires > clock_timestamp()
    RETURNING wanted
)
-- The release does not wait for the disk: if a crash loses it, the hold ends with its term.
-- A message costs every session that listens some time, so there is none unless a caller waits.
SELECT set_config('synchronous_commit', 'off', true),
    CASE WHEN wanted > clock_timestamp() THEN pg_notify($3, $4) END IS NULL
FROM freed
