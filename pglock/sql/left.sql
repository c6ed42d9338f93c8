-- left is the rest of the term of the row in µs, or NULL if the term has no end.
(extract(epoch FROM NULLIF(expires, 'infinity') - clock_timestamp()) * 1000000)::bigint
