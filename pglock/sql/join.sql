-- join takes a key that is free, or that has shared holds only, for a shared hold.
-- $1 to $10 as in take, $11 channel
-- Returns what take returns. While a caller waits that wants the key alone, those who come later
-- are refused.
WITH seen AS MATERIALIZED (
    SELECT l.owner, l.readers, l.expires, $8::int < 2 OR {settled} AS settled
    FROM {table} l WHERE l.key = $1 AND {closed}
), {patience}, taken AS (
    INSERT INTO {table} AS l (key, readers, since, expires, fence, fenced)
    SELECT $1, {reader}, clock_timestamp(), {term}, {micros}, $5
    FROM setting WHERE NOT EXISTS (SELECT FROM seen)
    ON CONFLICT (key) DO UPDATE SET
        key = excluded.key, -- locks the row as take does
        token = NULL, owner = '',
        -- The other shared holds stay, unless they have ended.
        readers = coalesce((
            SELECT jsonb_object_agg(r.key, r.value) FROM jsonb_each(l.readers) r
            WHERE {readerend} > clock_timestamp()), '{}') || {reader},
        since = clock_timestamp(),
        expires = greatest({term}, CASE WHEN l.readers IS NOT NULL THEN l.expires END),
        fence = greatest(l.fence + 1, {micros}),
        fenced = excluded.fenced,
        -- For 100 ms this place, or the shared heir, is not kept out by a caller that wants the key
        -- alone, so that the Client's other callers at the same place join, too.
        heir = CASE WHEN l.heir < 0 AND l.heir_until > clock_timestamp() THEN l.heir ELSE NULLIF($7, 0) END,
        heir_until = CASE WHEN l.heir < 0 AND l.heir_until > clock_timestamp() THEN l.heir_until ELSE clock_timestamp() + interval '100 ms' END,
        {leaves}
    WHERE {closed} IS NOT TRUE
    RETURNING fence, waiters[1] AS next
), waits AS (
    UPDATE {table} l SET {enters} FROM setting, seen
    WHERE l.key = $1 AND NOT seen.settled AND {closed}
    RETURNING 1
)
-- If the next waiter wants a shared hold as well, it can join now. It then wakes the next one.
SELECT fence, '', false, NULL::bigint, true,
    CASE WHEN next < 0 THEN pg_notify($11::text || '_' || (-next >> 32), next::text)::text END
FROM taken
UNION ALL
{refusal}
