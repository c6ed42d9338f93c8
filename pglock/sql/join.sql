-- join takes a key that is free, or that has shared holds only, for a shared hold.
-- $1 to $10 as in take, $11 channel
-- Returns what take returns. While a caller waits that wants the key alone, those who come later
-- are refused. An heir that wants a shared hold keeps nobody out.
WITH seen AS MATERIALIZED (
    SELECT l.owner, l.readers, l.expires, $8::int < 2 OR {settled} AS settled
    FROM {table} l WHERE l.key = $1
        AND (l.readers IS NULL AND l.expires > clock_timestamp() OR {barred} AND l.heir > 0 OR {ahead})
), setting AS MATERIALIZED (
    SELECT set_config('lock_timeout', CASE WHEN EXISTS (SELECT FROM seen) THEN $9 ELSE $6 END, true)
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
        fenced = excluded.fenced,
        -- For 100 ms this place, or the shared heir, is not kept out by a caller that wants the key
        -- alone, so that the Client's other callers at the same place join, too.
        heir = CASE WHEN l.heir < 0 AND l.heir_until > clock_timestamp() THEN l.heir ELSE NULLIF($7, 0) END,
        heir_until = CASE WHEN l.heir < 0 AND l.heir_until > clock_timestamp() THEN l.heir_until ELSE clock_timestamp() + interval '100 ms' END,
        {leaves}
    WHERE (l.expires IS NULL OR l.expires <= clock_timestamp() OR l.readers IS NOT NULL)
        AND NOT ({barred} AND l.heir > 0) AND NOT {ahead}
    RETURNING fence, waiters[1] AS next
), waits AS (
    UPDATE {table} l SET {enters} FROM setting, seen
    WHERE l.key = $1 AND NOT seen.settled
        AND (l.readers IS NULL AND l.expires > clock_timestamp() OR {barred} AND l.heir > 0 OR {ahead})
    RETURNING 1
)
-- If the next waiter wants a shared hold as well, it can join now. It then wakes the next one.
SELECT fence, '', false, NULL::bigint, true,
    CASE WHEN next < 0 THEN pg_notify($11::text || '_' || (-next >> 32), next::text)::text END
FROM taken
UNION ALL
SELECT NULL, CASE WHEN readers IS NULL THEN encode(owner, 'hex') ELSE '' END, readers IS NOT NULL,
    (extract(epoch FROM NULLIF(expires, 'infinity') - clock_timestamp()) * 1000000)::bigint,
    settled OR EXISTS (SELECT FROM waits),
    CASE WHEN EXISTS (SELECT FROM waits) THEN set_config('synchronous_commit', 'off', true) END
FROM seen
