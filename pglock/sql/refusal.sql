-- refusal is the row about the hold that take and join have seen.
-- A place in the line does not wait for the disk: if a crash loses it, the caller asks in a second.
-- A grant does, because another caller could get the key after a crash.
SELECT NULL, CASE WHEN readers IS NULL THEN encode(owner, 'hex') ELSE coalesce((
        SELECT r.value ->> 'owner' FROM jsonb_each(readers) r
        WHERE {readerend} > clock_timestamp() LIMIT 1), '') END,
    readers IS NOT NULL, {left}, settled OR EXISTS (SELECT FROM waits),
    CASE WHEN EXISTS (SELECT FROM waits) THEN set_config('synchronous_commit', 'off', true) END
FROM seen
