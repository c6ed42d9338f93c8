-- closed is true if the waiter $7 cannot join l. An heir that wants a shared hold keeps nobody out.
(l.readers IS NULL AND l.expires > clock_timestamp() OR {barred} AND l.heir > 0 OR {ahead})
