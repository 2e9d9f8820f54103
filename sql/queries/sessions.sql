-- name: session_begin
-- Begin a session of a person at a console.
SELECT mqlayer.console_session_begin_v1(%(token_hash)s::bytea, %(name)s::text, %(level)s::text, %(bodies)s::boolean,
                                        %(proof)s::text, %(idle_s)s::int, %(longest_s)s::int);

-- name: session_of
-- The session of a token, if it is not over.
SELECT name, level, bodies, proof FROM mqlayer.console_session_v1(%(token_hash)s::bytea, %(use)s::boolean);

-- name: session_end
-- End a session; whether it was there.
SELECT mqlayer.console_session_end_v1(%(token_hash)s::bytea);
