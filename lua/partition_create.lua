#!lua
--[[
partition_create: make one partition's meta, once.

KEYS
  1 meta_key    hash    state, range of LPs, next offset

ARGV
  1 topic       string  name, for people who look at the keys
  2 lp_from     int     first LP served
  3 lp_to       int     first LP after the range
  4 state       string  "open", or "importing" for a successor that waits for its marks
  5 change      string  the route change it is made for; empty for a topic's first route

RETURNS
  {"created"}           it did not exist
  {"unchanged", state}  it exists with this range and change; nothing was changed
  {"conflict", state}   it exists otherwise; nothing was changed
]]
local meta_key = KEYS[1]
local topic = ARGV[1]
local lp_from = ARGV[2]
local lp_to = ARGV[3]
local state = ARGV[4]
local change = ARGV[5]

local meta = redis.call('HMGET', meta_key, 'state', 'lp_from', 'lp_to', 'change')
if meta[1] then
  if meta[2] == lp_from and meta[3] == lp_to and meta[4] == change then return {'unchanged', meta[1]} end
  return {'conflict', meta[1]}
end
redis.call('HSET', meta_key, 'state', state, 'topic', topic, 'lp_from', lp_from, 'lp_to', lp_to,
  'change', change, 'next', '1', 'first', '1')
return {'created'}
