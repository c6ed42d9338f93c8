-- inspect reports on a key. $1 key
SELECT key, coalesce(expires > clock_timestamp(), false), owner, since,
    CASE WHEN expires > clock_timestamp()
        THEN (extract(epoch FROM expires - clock_timestamp()) * 1000000)::bigint ELSE 0 END,
    CASE WHEN fenced THEN fence ELSE 0 END,
    CASE WHEN readers IS NULL THEN NULL ELSE ARRAY(
        SELECT decode(r.value ->> 'owner', 'hex') FROM jsonb_each(readers) r
        WHERE (r.value ->> 'end')::timestamptz > clock_timestamp() LIMIT 1000) END
FROM {table} WHERE key = $1
