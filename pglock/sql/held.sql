-- held is true if the waiter $7 cannot take l alone.
(l.expires > clock_timestamp() OR {barred})
