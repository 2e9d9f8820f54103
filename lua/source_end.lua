#!lua flags=allow-oom
--[[
source_end: have a node take nothing more under sources of outboxes that go on under others.

KEYS
  1 ended_key     set     the node's: sources that are ended

ARGV
  1 first         str     a source; or <source>:closed, where its outbox goes on under another one already
  2 ...           more of these, up to 1,000 in all

RETURNS
  {"ok", count}   of these were not known as ended
]]
local ended_key = KEYS[1]
local first = ARGV[1]

if not tonumber((first:gsub(':closed$', ''))) or #ARGV > 1000 then return redis.error_reply('ERR source_end: 1 to 1000 sources') end
return {'ok', redis.call('SADD', ended_key, unpack(ARGV))}
