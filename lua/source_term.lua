#!lua flags=allow-oom
--[[
source_term: have a node take of a source only what was read in one term of its outbox's Postgres.

A crash of Postgres may take commits back, and ends the term. Who relays says the term in which it reads before it is
told how far the source's marks are; so what was read before the crash is refused from then on, however late it comes.

KEYS
  1 terms_key     hash    the node's: source -> the term of its outbox that counts
  2 ...           hash    states of the partitions that it has to have, if any

ARGV
  1 source        int     the outbox's
  2 term          str     not empty

RETURNS
  {"ok", term}    the one that counted before; empty: none
  {"absent"}      nothing told: it has none of the partitions; it lost them, or has them under another prefix
]]
local terms_key = KEYS[1]
local source = ARGV[1]
local term = ARGV[2]

if not tonumber(source) or term == '' then return redis.error_reply('ERR source_term: a source and its term') end
local is_there = #KEYS == 1
for i = 2, #KEYS do
  is_there = is_there or redis.call('EXISTS', KEYS[i]) == 1
end
if not is_there then return {'absent'} end
local before = redis.call('HGET', terms_key, source) or ''
if before ~= term then redis.call('HSET', terms_key, source, term) end
return {'ok', before}
