-- readerend is when the shared hold r ends.
(r.value ->> 'end')::timestamptz
