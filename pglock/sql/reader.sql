-- reader is the shared hold of the caller, in the form of the column readers.
jsonb_build_object($2::text, jsonb_build_object('owner', encode($3::bytea, 'hex'), 'end', {term}))
