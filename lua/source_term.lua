#!lua flags=allow-oom
--[[
source_term: have a node take of a source only what was read in one term of its outbox's Postgres.

A crash of Postgres may take commits back, and ends the term. A relay tells the node its term before it asks for marks,
so rows that were read before the crash are refused from then on, however late they come. Each change of the term makes
a new token: where a late relay tells an old term and another one the right term again, appends sent before are refused.

KEYS
  1 terms_key     hash    the node's: source -> the token of the term of its outbox that counts
  2 ...           hash    states of the partitions that it has to have, if any

ARGV
  1 source        int     the outbox's
  2 term          str     not empty, without #
  3 nonce         str     unlike any other caller's

RETURNS
  {"ok", token}   what appends have to carry: <term>#<nonce> of whoever said the term first
  {"absent"}      nothing told: it has none of the partitions; it lost them, or has them under another prefix
]]
local terms_key = KEYS[1]
local source = ARGV[1]
local term = ARGV[2]
local nonce = ARGV[3]

if not tonumber(source) or term == '' or string.find(term, '#', 1, true) or nonce == '' then
  return redis.error_reply('ERR source_term: a source, its term and a nonce')
end
local is_there = #KEYS == 1
for i = 2, #KEYS do
  is_there = is_there or redis.call('EXISTS', KEYS[i]) == 1
end
if not is_there then return {'absent'} end
local token = redis.call('HGET', terms_key, source)
if not token or string.match(token, '^[^#]*') ~= term then
  token = term .. '#' .. nonce
  redis.call('HSET', terms_key, source, token)
end
return {'ok', token}
