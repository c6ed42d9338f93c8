-- take takes a key that is free.
-- $1 key, $2 token, $3 owner, $4 term in µs, $5 whether a fence was asked for, $6 lock_timeout
-- Returns one row with the fence, or one row about the hold, or no row if another caller has taken
-- the key since this statement began. The owner is in hexadecimal. The rest of the term is in µs,
-- or NULL if it has no end.
WITH setting AS MATERIALIZED (
    SELECT set_config('lock_timeout', $6, true)
), seen AS MATERIALIZED (
    -- Look first. A refusal then locks no row and writes nothing.
    SELECT owner, readers, expires,
        wanted > clock_timestamp() + interval '1500 ms'
            AND (readers IS NULL OR writer_until > clock_timestamp() + interval '1500 ms'
                AND writer_until <= clock_timestamp() + interval '3 s') AS marked -- see join
    FROM {table} WHERE key = $1 AND expires > clock_timestamp()
), taken AS (
    INSERT INTO {table} AS l (key, token, owner, since, expires, fence, fenced)
    SELECT $1, $2, $3, clock_timestamp(), clock_timestamp() + $4::bigint * interval '1 us',
        (extract(epoch FROM clock_timestamp()) * 1000000)::bigint, $5
    FROM setting WHERE NOT EXISTS (SELECT FROM seen)
    ON CONFLICT (key) DO UPDATE SET
        -- Setting the key makes PostgreSQL lock the row FOR UPDATE. So this waits for a
        -- transaction that guards a write of the last holder by FOR KEY SHARE.
        key = excluded.key,
        token = excluded.token, owner = excluded.owner, readers = NULL,
        -- The clock is read again: locking the row may have taken time.
        since = clock_timestamp(),
        expires = clock_timestamp() + $4::bigint * interval '1 us',
        -- The row is locked, so l.fence is the fence of the last hold, whichever that is.
        fence = greatest(l.fence + 1, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint),
        fenced = excluded.fenced,
        writer = NULL, writer_until = NULL
    -- This condition decides. Unlike seen, it sees the last version of the row.
    WHERE l.expires IS NULL OR l.expires <= clock_timestamp()
    RETURNING fence
)
SELECT fence, '', false, NULL::bigint, false FROM taken
UNION ALL
SELECT NULL, CASE WHEN readers IS NULL THEN encode(owner, 'hex') ELSE coalesce((
        SELECT r.value ->> 'owner' FROM jsonb_each(readers) r
        WHERE (r.value ->> 'end')::timestamptz > clock_timestamp() LIMIT 1), '') END,
    readers IS NOT NULL,
    (extract(epoch FROM NULLIF(expires, 'infinity') - clock_timestamp()) * 1000000)::bigint,
    marked IS TRUE
FROM seen
