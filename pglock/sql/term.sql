-- term is the end of a term of $4 µs that begins now.
clock_timestamp() + $4::bigint * interval '1 us'
