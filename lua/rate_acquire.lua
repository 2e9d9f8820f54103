#!lua flags=allow-oom
--[[
rate_acquire: take what a group may begin of its rate, from one partition's share of it.

The share flows into the bucket at its rate, by this node's clock, up to the bucket's size. A clock that goes back gives
nothing and takes nothing: the bucket fills on from the new time. One that goes forward fills the bucket once. A bucket
that nobody knows begins with no more than one message for the whole group: a node that lost it gives no flood.

What is taken may be a part of a message: a member puts the shares of its partitions together.

KEYS
  1 rate_key      hash    left: messages that may be begun; at_us: by what time of the node. Goes when it would be full

ARGV
  1 per_s         number  how fast this share fills, in messages
  2 size          number  what it holds at most
  3 first         number  what it holds when nobody knows it
  4 wanted        number  take no more than this

RETURNS
  {given, left}   as text: what was taken, and what is there still
]]
local rate_key = KEYS[1]
local per_s = tonumber(ARGV[1])
local size = tonumber(ARGV[2])
local first = tonumber(ARGV[3])
local wanted = tonumber(ARGV[4])

if not (per_s > 0 and size > 0 and first >= 0 and wanted >= 0) then
  return redis.error_reply('ERR rate_acquire: a rate and a size over 0, first and wanted of 0 or more')
end
local time = redis.call('TIME')
local now_us = tonumber(time[1]) * 1000000 + tonumber(time[2])
local bucket = redis.call('HMGET', rate_key, 'left', 'at_us')
local left = first
if bucket[1] then
  left = tonumber(bucket[1]) + math.max(0, now_us - tonumber(bucket[2])) / 1000000 * per_s
end
left = math.min(left, size)
local given = math.min(left, wanted)
left = left - given
redis.call('HSET', rate_key, 'left', string.format('%.9f', left), 'at_us', string.format('%d', now_us))
redis.call('PEXPIRE', rate_key, string.format('%d', math.min(1e12, 60000 + math.ceil((size - left) / per_s * 1000))))
return {string.format('%.9f', given), string.format('%.9f', left)}
