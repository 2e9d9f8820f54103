-- protocol 2
-- A relay says where it runs in this schema too: the other place that says so is the control schema, which it may not
-- reach. Empty: its code has protocol 1.
ALTER TABLE mqlayer_app.relay ADD COLUMN host text NOT NULL DEFAULT '', ADD COLUMN pid int NOT NULL DEFAULT 0;
ALTER TABLE mqlayer_app.relay ADD CONSTRAINT relay_place CHECK (octet_length(host) <= 1024 AND pid BETWEEN 0 AND 2000000000);
