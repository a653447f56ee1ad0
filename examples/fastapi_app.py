"""A FastAPI application with a worker of its own.

    uvicorn --app-dir examples fastapi_app:app

    curl localhost:8000/users -H "content-type: application/json" -d '{"email": "ada@example.org"}'
    curl localhost:8000/users/1

POST stores a user and a job in one transaction: both, or neither. The worker starts and stops with
the application, in each process that uvicorn starts. It runs on a SQLite file; set DATABASE_URL to
run it on PostgreSQL.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, FastAPI, HTTPException
from pydantic import BaseModel
from sqlalchemy import make_url
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from sqlalchemy_jobs import AsyncJobSession, AsyncWorker, JobContext, Tasks, metadata

url = make_url(os.environ.get("DATABASE_URL", "sqlite+aiosqlite:///fastapi_app.sqlite"))
if url.drivername in {"postgres", "postgresql"}:
    url = url.set(drivername="postgresql+asyncpg")
engine = create_async_engine(url)
Session = async_sessionmaker(engine, class_=AsyncJobSession)
tasks = Tasks()
worker = AsyncWorker(engine, tasks)


class Base(DeclarativeBase):
    pass


class User(Base):
    __tablename__ = "fastapi_users"
    id: Mapped[int] = mapped_column(primary_key=True)
    email: Mapped[str] = mapped_column(unique=True)
    welcomed: Mapped[bool] = mapped_column(default=False)


@dataclass
class Welcome:
    user_id: int


async def send_mail(address: str, message_id: str) -> None:
    """Stand for a mail server, which takes its time and drops a message_id that it knows."""
    await asyncio.sleep(1)
    print(f"mail {message_id} to {address}")


@tasks.task("send-welcome", timeout=30)
async def send_welcome(job: JobContext[Welcome]) -> None:
    async with Session() as session:
        user = await session.get_one(User, job.payload.user_id)
    # No transaction is open while the mail server takes its time. Should this attempt be cut off,
    # the next one sends the same message_id.
    await send_mail(user.email, message_id=f"job-{job.id}")
    async with Session.begin() as session:
        user = await session.get_one(User, job.payload.user_id)
        user.welcomed = True


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    async with engine.begin() as connection:  # a real application uses Alembic
        await connection.run_sync(metadata.create_all)
        await connection.run_sync(Base.metadata.create_all)
    async with worker:
        yield
    await engine.dispose()


app = FastAPI(lifespan=lifespan)


async def get_session() -> AsyncIterator[AsyncJobSession]:
    """Open a transaction: it is committed if the route returns, rolled back if it raises."""
    async with Session.begin() as session:
        yield session


# scope="function": commit before the response is sent. FastAPI's default is after it, when the
# client has been told of a success that may still fail.
SessionOfRequest = Annotated[AsyncJobSession, Depends(get_session, scope="function")]


class NewUser(BaseModel):
    email: str


@app.post("/users", status_code=201)
async def create_user(new: NewUser, session: SessionOfRequest) -> dict[str, int | None]:
    user = User(email=new.email)
    session.add(user)
    job_id = await session.enqueue("send-welcome", lambda: Welcome(user.id))
    return {"user_id": user.id, "job_id": job_id}


@app.get("/users/{user_id}")
async def read_user(user_id: int, session: SessionOfRequest) -> dict[str, str | bool]:
    user = await session.get(User, user_id)
    if user is None:
        raise HTTPException(404)
    return {"email": user.email, "welcomed": user.welcomed}
