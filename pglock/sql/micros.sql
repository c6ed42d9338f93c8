-- micros is the present time in µs.
(extract(epoch FROM clock_timestamp()) * 1000000)::bigint
