-- barred is true if only the heir may take the free key l, and the waiter $7 is not the heir. An
-- heir that has died keeps others out for a second. A time that is more than a second ahead does not
-- count, because the server's clock was set back.
(l.heir <> $7 AND l.readers IS NULL AND l.heir_until > clock_timestamp()
    AND l.heir_until <= clock_timestamp() + interval '1 s') IS TRUE
