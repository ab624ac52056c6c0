module crossdock.test/kserve

go 1.26.0

require github.com/kserve/kserve v0.20.0
