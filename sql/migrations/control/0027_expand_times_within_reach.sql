-- Times that consumers write of their groups: one without end, or beyond what programs can hold, ended lists and checks of
-- all groups. A lease of -infinity: the member is gone.
UPDATE mqlayer.parked_key SET due_at = now() WHERE due_at NOT BETWEEN '1970-01-01 00:00+00' AND '9000-01-01 00:00+00';
UPDATE mqlayer.member SET lease_until = '-infinity'
WHERE lease_until <> '-infinity' AND lease_until NOT BETWEEN '1970-01-01 00:00+00' AND '9000-01-01 00:00+00';
ALTER TABLE mqlayer.parked_key ADD CONSTRAINT parked_key_due_at
    CHECK (due_at BETWEEN '1970-01-01 00:00+00' AND '9000-01-01 00:00+00');
ALTER TABLE mqlayer.member ADD CONSTRAINT member_lease_until
    CHECK (lease_until = '-infinity' OR lease_until BETWEEN '1970-01-01 00:00+00' AND '9000-01-01 00:00+00');
