-- join takes a key that is free, or that has shared holds only, for a shared hold.
-- $1 key, $2 token, $3 owner, $4 term in µs, $5 whether a fence was asked for, $6 lock_timeout
-- Returns what take returns. While a writer waits, no new shared hold is granted.
WITH setting AS MATERIALIZED (
    SELECT set_config('lock_timeout', $6, true)
), seen AS MATERIALIZED (
    SELECT owner, readers, expires, wanted > clock_timestamp() + interval '1500 ms' AS marked
    FROM {table} WHERE key = $1
        AND (readers IS NULL AND expires > clock_timestamp()
            -- A mark lasts 3 s at most. A later time comes from a clock that was wrong.
            OR writer_until > clock_timestamp() AND writer_until <= clock_timestamp() + interval '3 s')
), taken AS (
    INSERT INTO {table} AS l (key, readers, since, expires, fence, fenced)
    SELECT $1, jsonb_build_object($2::text, jsonb_build_object('owner', encode($3::bytea, 'hex'),
            'end', clock_timestamp() + $4::bigint * interval '1 us')),
        clock_timestamp(), clock_timestamp() + $4::bigint * interval '1 us',
        (extract(epoch FROM clock_timestamp()) * 1000000)::bigint, $5
    FROM setting WHERE NOT EXISTS (SELECT FROM seen)
    ON CONFLICT (key) DO UPDATE SET
        key = excluded.key, -- locks the row as take does
        token = NULL, owner = '',
        -- The other shared holds stay, unless they have ended.
        readers = coalesce((
            SELECT jsonb_object_agg(r.key, r.value) FROM jsonb_each(l.readers) r
            WHERE (r.value ->> 'end')::timestamptz > clock_timestamp()), '{}') ||
            jsonb_build_object($2::text, jsonb_build_object('owner', encode($3::bytea, 'hex'),
                'end', clock_timestamp() + $4::bigint * interval '1 us')),
        since = clock_timestamp(),
        expires = greatest(clock_timestamp() + $4::bigint * interval '1 us',
            CASE WHEN l.readers IS NOT NULL THEN l.expires END),
        fence = greatest(l.fence + 1, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint),
        fenced = excluded.fenced
    WHERE (l.expires IS NULL OR l.expires <= clock_timestamp() OR l.readers IS NOT NULL)
        AND (l.writer_until IS NULL OR l.writer_until <= clock_timestamp()
            OR l.writer_until > clock_timestamp() + interval '3 s')
    RETURNING fence
)
SELECT fence, '', false, NULL::bigint, false FROM taken
UNION ALL
SELECT NULL, CASE WHEN readers IS NULL THEN encode(owner, 'hex') ELSE '' END, readers IS NOT NULL,
    (extract(epoch FROM NULLIF(expires, 'infinity') - clock_timestamp()) * 1000000)::bigint,
    marked IS TRUE
FROM seen
