// A table that owners on other hosts hold, as a store of rows: what a host without the memory serves to its own processes.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "remote_client.hpp"
#include "rows.hpp"

namespace treadle::dataplane {

class RemoteTable : public RowStore {
public:
    // Rows of `number`, asked of `client`; a gather that takes longer than `give_up_ns` ends as a fault.
    RemoteTable(std::shared_ptr<RemoteClient> client, int32_t number, int64_t row_count, int64_t row_bytes, int64_t give_up_ns)
        : RowStore(Tier::remote, row_count, row_bytes), client_(std::move(client)), number_(number), give_up_ns_(give_up_ns) {}

    Fault gather(const int64_t* rows, int64_t count, std::byte* out) noexcept override {
        if (count == 0) return Fault::none;
        try {
            const CallRef call = make_call(count, out);
            std::vector<Share> shares = shares_of(*call, {rows, rows + count});
            if (shares.empty()) return Fault::unavailable;  // some row has no owner now
            const TicketRef ticket = call->layers[0].ticket;
            if (const Fault fault = client_->start(call, std::move(shares)); fault != Fault::none) return fault;
            while (!ticket->wait_until(now_ns() + give_up_ns_)) client_->cancel(call, 0);  // it ends: nobody may write to `out` after this
            return ticket->state() == State::complete ? Fault::none : ticket->fault == Fault::none ? Fault::late : ticket->fault;
        } catch (...) {  // no memory for the request
            return Fault::refused;
        }
    }

private:
    CallRef make_call(int64_t count, std::byte* out) const {
        const RemoteVersion& version = *client_->version();
        const int64_t now = now_ns(), give_up = now + give_up_ns_;
        auto call = std::make_shared<Call>();
        call->spread = version.spread();
        call->header.version = version.digest;
        call->header.fingerprint = version.fingerprint;
        call->header.token = version.token;
        call->deadline_ns = call->give_up_ns = give_up;
        call->whole = call->spread->routes[static_cast<size_t>(version.position(number_))] == nullptr;
        call->layers.push_back({std::make_shared<Ticket>(Job{{}, count, 1}, give_up, nullptr), out, count, row_bytes, 0, {}});
        call->layers[0].ticket->submitted_ns = call->layers[0].ticket->started_ns = now;
        call->numbers.push_back(number_);
        call->row_bytes.push_back(row_bytes);
        return call;
    }

    std::vector<Share> shares_of(const Call& call, std::vector<int64_t> ids) const {
        const Split split(call, 0, now_ns());
        std::vector<Segment> segments{{0, 0, 0, std::move(ids), {}}};
        if (call.whole) return split.whole({gather_work(std::move(segments), call.numbers, call.row_bytes)});
        return split.rows(segments, {client_->version()->position(number_)});
    }

    const std::shared_ptr<RemoteClient> client_;
    const int32_t number_;
    const int64_t give_up_ns_;
};

}  // namespace treadle::dataplane
