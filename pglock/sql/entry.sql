-- entry has the columns of inspect and list. Their types have the same text form whatever
-- bytea_output and DateStyle are.
-- key and owner in hexadecimal, whether the key is held, since in µs, the rest of the term in µs
-- or NULL if it has no end, the fence, the shared holds as JSON, the present time in µs
encode(key, 'hex'), encode(owner, 'hex'), expires > clock_timestamp() IS TRUE,
    CASE WHEN isfinite(since) THEN (extract(epoch FROM since) * 1000000)::bigint ELSE 0 END,
    CASE WHEN expires > clock_timestamp() THEN {left} END,
    CASE WHEN fenced THEN fence ELSE 0 END,
    readers::text, {micros}
